"""Pyramids and annotated summaries in the XML of DUCView: `.pyr` and `.pan`.

A pyramid lists the content units that people found in several reference summaries; a unit's weight is the number of
references that express it. A `.pan` file holds a pyramid, one more summary, and which units people found in that.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.parsers import expat

from ropewalk.base.errors import DataError
from ropewalk.base.files import committed_file

OTHER = "0"
"""The uid that DUCView gives to the text in no unit."""
_OTHER_LABEL = "All non-matching SCUs go here"


@dataclass(frozen=True, slots=True)
class TextPart:
    """A stretch of the text."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Contributor:
    """An expression of a content unit: one stretch of a summary, or several."""

    label: str
    parts: tuple[TextPart, ...]


@dataclass(frozen=True, slots=True)
class ContentUnit:
    """A summary content unit (SCU)."""

    uid: str
    label: str
    contributors: tuple[Contributor, ...]

    @property
    def weight(self) -> int:
        """How many references express it."""
        return len(self.contributors)


@dataclass(frozen=True, slots=True)
class Pyramid:
    """The content units of some reference summaries, which are the lines of `text`."""

    text: tuple[str, ...]
    units: tuple[ContentUnit, ...]
    start_document: str = ""
    """A regular expression of the lines that begin a reference."""

    @property
    def references(self) -> int:
        """How many references there are, by the lines that begin one; without these, the largest weight."""
        begin = re.compile(self.start_document) if self.start_document else None
        found = sum(bool(begin.search(line)) for line in self.text) if begin else 0
        return max([found, *(unit.weight for unit in self.units)])

    @property
    def units_per_reference(self) -> float:
        """The mean number of units of a reference."""
        return sum(unit.weight for unit in self.units) / self.references

    def largest_sum(self, units: int) -> int:
        """The sum of weights of a summary with so many units, all of the heaviest."""
        return sum(sorted((unit.weight for unit in self.units), reverse=True)[:units])


@dataclass(frozen=True, slots=True)
class Annotation:
    """A summary in which people have marked the units of a pyramid."""

    pyramid: Pyramid
    text: tuple[str, ...]
    found: Mapping[str, tuple[Contributor, ...]]
    """Expressions of each unit of the pyramid, by its uid; empty for units that it lacks."""
    other: tuple[Contributor, ...]
    """Content that is in no unit."""


def read_pyramid(path: Path) -> Pyramid:
    """The pyramid of a `.pyr` or `.pan` file."""
    root = _parse(path)
    return _pyramid(_child(root, "pyramid", path) if root.tag == "peerAnnotation" else root, path)


def read_annotation(path: Path) -> Annotation:
    """The annotated summary of a `.pan` file."""
    root = _parse(path)
    if root.tag != "peerAnnotation":
        raise DataError(f"{path}: a `{root.tag}`, not a `peerAnnotation`; name the .pan file of a summary")
    pyramid, inner = _pyramid(_child(root, "pyramid", path), path), _child(root, "annotation", path)
    found = {_given(unit, "uid", path): _contributors(unit, path) for unit in inner.iter("peerscu")}
    unknown = found.keys() - {OTHER} - {unit.uid for unit in pyramid.units}
    if unknown:
        raise DataError(f"{path}: `peerscu` {min(unknown)} is not in the pyramid of the file")
    other = found.pop(OTHER, ())
    return Annotation(pyramid, _lines(inner, path), found, other)


def write_pyramid(pyramid: Pyramid, path: Path) -> None:
    """Writes a `.pyr` file that DUCView opens."""
    _write(_pyramid_element(pyramid), path)


def write_annotation(annotation: Annotation, path: Path) -> None:
    """Writes a `.pan` file that DUCView opens."""
    root = ET.Element("peerAnnotation")
    root.append(_pyramid_element(annotation.pyramid))
    inner = ET.SubElement(root, "annotation")
    inner.append(_text_element(annotation.text))
    for unit in annotation.pyramid.units:
        label = f"({unit.weight}) {unit.label}"
        inner.append(_unit_element("peerscu", unit.uid, label, annotation.found.get(unit.uid, ())))
    inner.append(_unit_element("peerscu", OTHER, _OTHER_LABEL, annotation.other))
    _write(root, path)


def _parse(path: Path) -> ET.Element:
    """The root element. Files come from strangers: entities, which may expand to gigabytes, are refused."""
    builder, parser = ET.TreeBuilder(), expat.ParserCreate()

    def refuse(name: str, *_: object) -> None:
        raise DataError(f"{path}: declares the entity `{name}`; DUCView files have none")

    parser.EntityDeclHandler = refuse
    parser.StartElementHandler, parser.EndElementHandler = builder.start, builder.end
    parser.CharacterDataHandler = builder.data
    try:
        parser.Parse(path.read_bytes(), True)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except expat.ExpatError as error:
        raise DataError(
            f"{path}: not XML, as annotated summaries (.pan) are: {error}; files of lines are named by "
            "--predictions and --references"
        ) from error
    root = builder.close()
    if root.tag not in ("pyramid", "peerAnnotation"):
        raise DataError(f"{path}: a `{root.tag}`; expected a `pyramid` (.pyr) or `peerAnnotation` (.pan) of DUCView")
    return root


def _pyramid(root: ET.Element, path: Path) -> Pyramid:
    units = tuple(
        ContentUnit(_given(unit, "uid", path), _given(unit, "label", path), _contributors(unit, path))
        for unit in root.iter("scu")
    )
    if not any(unit.weight for unit in units):
        raise DataError(f"{path}: the pyramid has no content units")
    start = (root.findtext("startDocumentRegEx") or "").strip()
    try:
        re.compile(start)
    except re.error as error:
        raise DataError(f"{path}: `startDocumentRegEx` {start!r} is no regular expression: {error}") from error
    return Pyramid(_lines(root, path), units, start)


def _lines(root: ET.Element, path: Path) -> tuple[str, ...]:
    return tuple(line.text or "" for line in _child(root, "text", path).iter("line"))


def _contributors(unit: ET.Element, path: Path) -> tuple[Contributor, ...]:
    return tuple(
        Contributor(_given(each, "label", path), tuple(_part(part, path) for part in each.iter("part")))
        for each in unit.iter("contributor")
    )


def _part(part: ET.Element, path: Path) -> TextPart:
    start, end = (_given(part, name, path) for name in ("start", "end"))
    if not (start.isdecimal() and end.isdecimal()):
        raise DataError(f"{path}: a `part` from {start!r} to {end!r}; positions are whole numbers")
    return TextPart(_given(part, "label", path), int(start), int(end))


def _child(root: ET.Element, name: str, path: Path) -> ET.Element:
    found = root.find(name)
    if found is None:
        raise DataError(f"{path}: `{root.tag}` has no `{name}`")
    return found


def _given(element: ET.Element, name: str, path: Path) -> str:
    found = element.get(name)
    if found is None:
        raise DataError(f"{path}: a `{element.tag}` has no `{name}`")
    return found


def _pyramid_element(pyramid: Pyramid) -> ET.Element:
    root = ET.Element("pyramid")
    if pyramid.start_document:
        ET.SubElement(root, "startDocumentRegEx").text = pyramid.start_document
    root.append(_text_element(pyramid.text))
    root.extend(_unit_element("scu", unit.uid, unit.label, unit.contributors) for unit in pyramid.units)
    return root


def _text_element(lines: Sequence[str]) -> ET.Element:
    text = ET.Element("text")
    for line in lines:
        ET.SubElement(text, "line").text = line
    return text


def _unit_element(tag: str, uid: str, label: str, contributors: Sequence[Contributor]) -> ET.Element:
    unit = ET.Element(tag, uid=uid, label=label)
    for each in contributors:
        contributor = ET.SubElement(unit, "contributor", label=each.label)
        for part in each.parts:
            ET.SubElement(contributor, "part", label=part.text, start=str(part.start), end=str(part.end))
    return unit


def _write(root: ET.Element, path: Path) -> None:
    ET.indent(root, " ")
    with committed_file(path) as file:
        file.write(b'<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="utf-8") + b"\n")
