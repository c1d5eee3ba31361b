"""Output of a training: the model or its soft tokens, a report, and a plot of the loss."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from kvwire._lazy import require
from kvwire._user_file import file_errors
from kvwire._version import __version__
from kvwire.engines.transformers.identity import model_revision
from kvwire.engines.transformers.progress_bars import quiet
from kvwire.reuse import SoftTokens

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvwire.engines.transformers import TransformersEngine
    from kvwire.training.loop import Trained, Training

SOFT_TOKENS, MODEL, REPORT, PICTURE, STATE = "soft-tokens.safetensors", "model", "report.json", "loss.png", "state.pt"
"""Names in the output folder."""
_KEPT = "the training is saved, continue with --resume"


def write_trained(engine: TransformersEngine, trained: Trained, what: Training, folder: Path) -> dict[str, str]:
    """Write what was trained: weights as a folder for transformers, soft tokens as a file.

    Args:
        engine: Ran the model.
        trained: Result of the training.
        what: Its settings.
        folder: Output folder; created if missing.

    Returns:
        Paths of the output, by ``model`` and ``soft_tokens``.

    Raises:
        StorageError: It cannot be written.
    """
    written: dict[str, str] = {}
    name, revision = engine.meta.model_id, engine.meta.model_revision
    with file_errors(f"{folder} cannot be written", _KEPT):
        folder.mkdir(parents=True, exist_ok=True)
        if not what.is_frozen:
            place = folder / MODEL
            trained.model.close()  # removes its hooks before saving
            with quiet():
                engine.model.save_pretrained(place)
            if engine.has_tokenizer:
                engine.tokenizer.save_pretrained(place)
            name, revision = f"{name}, {what.layout.name}", model_revision(place)
            written["model"] = str(place)
        if what.layout.soft_tokens:
            soft = SoftTokens(trained.model.soft.detach(), what.layout.name, name, revision)
            (folder / SOFT_TOKENS).write_bytes(soft.to_bytes())
            written["soft_tokens"] = str(folder / SOFT_TOKENS)
    return written


def report_of(engine: TransformersEngine, trained: Trained, what: Training, data: dict[str, float]) -> dict[str, Any]:
    """Report settings, data and losses.

    Args:
        engine: Ran the model.
        trained: Result of the training.
        what: Its settings.
        data: Weights of the files.

    Returns:
        Plain data, for JSON.
    """
    learnt = sum(parameter.numel() for parameter in trained.model.parameters().values())
    return {
        "method": what.method,
        "layout": what.layout.name,
        "frozen": what.is_frozen,
        "model": {"id": engine.meta.model_id, "revision": engine.meta.model_revision},
        "recipe": asdict(what.recipe),
        "seed": what.seed,
        "data": {name: {"weight": data[name], "samples": count} for name, count in trained.counts.items()},
        "parameters": {"learnt": learnt, "of": sum(each.numel() for each in engine.model.parameters())},
        "loss": trained.losses,
        "versions": {"kvwire": __version__, "torch": torch.__version__},
        "device": engine.device_name,
    }


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write the report and draw the loss.

    Args:
        report: From ``report_of``.
        folder: Output folder.

    Raises:
        StorageError: They cannot be written.
    """
    with file_errors(f"{folder} cannot be written", _KEPT):
        (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        title = f"{report['model']['id']}: {report['layout']}"
        draw_losses(report["loss"], title, report["method"], folder / PICTURE)


_PARTS = 40
"""Points of the plotted line, each the mean over an equal number of steps."""
_UNITS = {
    "links": "surprise at answers (nats a token)",
    "anchors": "surprise at answers (nats a token)",
    "wrappers": "KL divergence from full prefill (nats a token)",
}


def check_drawable() -> None:
    """Check for matplotlib before a training, not at its end."""
    require("matplotlib", "train", "kvwire train-links")


def draw_losses(losses: Sequence[float], title: str, method: str, path: Path) -> None:
    """Write a PNG: the loss of every step, and its running means."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    size = max(1, len(losses) // _PARTS)
    parts = [losses[at : at + size] for at in range(0, len(losses), size)]
    middles = [at * size + (len(part) + 1) / 2 for at, part in enumerate(parts)]
    axes.plot(range(1, len(losses) + 1), losses, color="#56B4E9", alpha=0.4, linewidth=0.8, label="each step")
    means = [sum(part) / len(part) for part in parts]
    axes.plot(middles, means, color="#0072B2", linewidth=1.8, label=f"mean over {size} steps")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(_UNITS[method])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title(title, fontsize=11)
    figure.savefig(path, dpi=130)
