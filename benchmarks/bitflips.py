"""How many flipped bits of a checkpoint are noticed: ropewalk beside torch.save, safetensors and DCP.

Each writes the same 8 MB state. One bit of one byte is flipped, drawn evenly over all bytes of all files, and the
checkpoint is loaded as its users load it. A flip is *noticed* when loading raises; *harmless* when every tensor comes
back right all the same (padding, an unused field); *silent* when something else than what was saved comes back.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import harness
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ropewalk.checkpoint.read.load import load
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from ropewalk.model.config import Model
from ropewalk.model.spec import resolve

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Format:
    """A way to keep tensors in a folder."""

    save: Callable[[Path, Tensors], None]
    load: Callable[[Path, Tensors], Tensors]
    """The tensors; the second argument has their names, shapes and types."""


def tensors(seed: int = 0) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (1000, 512), "norm": (512,), "out": (512, 2048), "moment": (512, 512), "bias": (2048,)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def ours_save(folder: Path, given: Tensors) -> None:
    spec = resolve(Model(width=8, heads=1), vocabulary=3, sequence_length=4)
    save(
        folder,
        State(step=1, tokens=1, seed=0, spec=spec, data={}, model=given, optimizer={}, tokenizer=b"{}"),
    )


def dcp_load(folder: Path, like: Tensors) -> Tensors:
    target = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    dcp.load(target, checkpoint_id=str(folder), no_dist=True)
    return target


FORMATS = {
    "ropewalk": Format(ours_save, lambda folder, _: dict(load(folder / "step-00000001").model)),
    "torch.save": Format(
        lambda folder, given: torch.save(given, folder / "state.pt"),
        lambda folder, _: torch.load(folder / "state.pt", weights_only=True),
    ),
    "safetensors": Format(
        lambda folder, given: safetensors.torch.save_file(given, folder / "state.safetensors"),
        lambda folder, _: safetensors.torch.load_file(folder / "state.safetensors"),
    ),
    "dcp": Format(
        lambda folder, given: dcp.save(given, checkpoint_id=str(folder), no_dist=True),
        dcp_load,
    ),
}


def score(form: Format, flips: int, *, seed: int) -> dict[str, float]:
    """Of `flips` flipped bits, how many were noticed, harmless and silent."""
    draw, given = random.Random(seed), tensors()
    counts = {"noticed": 0, "harmless": 0, "silent": 0}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        form.save(folder, given)
        # Ours publishes the newest for people; readers do not use it.
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "latest.json"]
        sizes = [path.stat().st_size for path in files]
        start = time.process_time()
        for number in range(flips):
            # Large files take most of the draws; every tenth goes to each file alike, so that headers are met too.
            (path,) = draw.choices(files, sizes) if number % 10 else (draw.choice(files),)
            position, bit = draw.randrange(path.stat().st_size), 1 << draw.randrange(8)
            flip(path, position, bit)
            counts[outcome(form, folder, given)] += 1
            flip(path, position, bit)
        counts["ms_a_load"] = round(1000 * (time.process_time() - start) / flips, 2)
    return {"flips": flips, "share_noticed": (counts["noticed"] + counts["harmless"]) / flips, **counts}


def flip(path: Path, position: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        (value,) = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ bit]))


def outcome(form: Format, folder: Path, given: Tensors) -> str:
    try:
        found = form.load(folder, given)
    except (Exception, CheckpointException):  # whatever is raised, the damage was noticed; DCP's is no Exception
        return "noticed"
    same = found.keys() == given.keys() and all(
        found[name].dtype == tensor.dtype and found[name].shape == tensor.shape and torch.equal(found[name], tensor)
        for name, tensor in given.items()
    )
    return "harmless" if same else "silent"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="200 flips instead of 1,000")
    flips = 200 if parser.parse_args().quick else 1000
    torch.set_num_threads(1)
    found = {name: score(form, flips, seed=5) for name, form in FORMATS.items()}
    ours = found.pop("ropewalk")
    # Silent flips of the peer for each of ours; ours counted as at least one, so that the ratio is finite.
    ratios = {name: max(1, peer["silent"]) / max(1, ours["silent"]) for name, peer in found.items()}
    harness.finish(
        "bitflips",
        ours=ours,
        peers=found,
        ratios=ratios,
        quality={"every_flip_noticed_or_harmless": ours["silent"] == 0, "bar": "0 silent flips of ours"},
    )


if __name__ == "__main__":
    main()
