"""PDF -> text by pypdf, an optional library. Scanned pages have no text; a PDF of nothing else is removed as empty."""

from __future__ import annotations

import importlib.util
import io
import logging
from collections.abc import Iterator

from ropewalk.base.errors import MissingPackage

from .caps import capped
from .item import Fault, Input, Item
from .rows import label
from .streams import whole


def pdf(given: Input) -> Iterator[Item]:
    """The file as one document, an empty line between pages."""
    require_pypdf(given.name)
    data = whole(given.stream, limit=given.limit)
    try:
        yield capped(given.settings.limits, lambda: _document(data, limit=given.limit))
    except Fault as fault:
        yield fault.item("", data)


def require_pypdf(name: str) -> None:
    """Says what to install when there is no pypdf; `name` is the file that needs it."""
    if importlib.util.find_spec("pypdf") is None:
        raise MissingPackage("pypdf", f"reading {name} (a PDF, which may be left out of `paths`)", "pdf")


def _document(data: bytes, *, limit: int) -> Item:
    import pypdf  # an optional library

    # It warns about every oddity of a file; what matters here is whether there is text.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Fault("encrypted")
        pages = []
        size = 0
        for page in reader.pages:
            pages.append(page.extract_text())
            size += len(pages[-1])
            if size > limit:
                raise Fault("too_large", value=size, threshold=limit)
        created = reader.metadata.creation_date if reader.metadata else None
    except (Fault, MemoryError, RecursionError):
        raise
    except Exception as error:
        # Damaged files make pypdf raise whatever its code meets: KeyError, TypeError, AttributeError, ...
        raise Fault("encrypted" if "crypt" in type(error).__name__.lower() else "not_pdf") from error
    # Some fonts give the halves of a surrogate pair as two characters.
    text = "\n\n".join(pages).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Item("", text.encode(), time=label(created.isoformat() if created else ""))
