"""``kvwire encode --engine vllm``: which options it takes, and what they mean to vLLM."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvwire.cli.inputs import model_name
from kvwire.cli.options import use_file
from kvwire.codec import DEFAULT_METHOD
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from kvwire.cli.options import StoreOptions
    from kvwire.offline import VllmSettings
    from kvwire.runtime.corpus import Corpus

_USUAL = {
    "force": False, "refit": False, "method": DEFAULT_METHOD, "prefix_layers": 0, "lossless": False,
    "deviation": False, "neutral_prefix": 0, "links": None, "soft_tokens": None, "resume": None,
    "calibration": "full", "profile": None,
}  # fmt: skip
"""Options that say what is computed or coded beyond a document's cache: vLLM's connector does not."""


def check_options(options: Any) -> None:  # noqa: ANN401 - what kvwire encode is given
    """Refuse options that vLLM does not serve."""
    if options.on != "ray":
        raise ArgumentError("vLLM encodes on Ray, which needs no cluster of its own: add --on ray")
    others = [name for name, usual in _USUAL.items() if getattr(options, name) != usual]
    if others:
        name = others[0].replace("_", "-")
        msg = f"--{name} is not for --engine vllm, which saves plain caches of documents: leave it or --engine out"
        raise ArgumentError(msg)
    if options.gpus not in (0, options.tensor_parallel):
        msg = "each worker of vLLM takes one GPU with --device cuda: leave --gpus out, and set --tensor-parallel"
        raise ArgumentError(msg)


def vllm_settings(place: StoreOptions, options: Any) -> VllmSettings:  # noqa: ANN401 - what kvwire encode is given
    """What options mean to vLLM."""
    from kvwire.engines.transformers.identity import find_folder
    from kvwire.offline import VllmSettings

    place.open_lasting().close()  # which refuses what is none
    folder, _ = find_folder(options.model)
    connector = {"store": place.store, "token": place.token, "tenant": place.tenant, "salt": place.salt}
    connector |= {"keys": place.keys}
    is_cpu = options.device == "cpu"
    dtype = "float32" if is_cpu and options.dtype == "auto" else options.dtype
    return VllmSettings(
        str(folder), {name: value for name, value in connector.items() if value}, options.tensor_parallel,
        0.0 if is_cpu else 1.0, dtype, _engine_args(options.engine_args),
    )  # fmt: skip


def vllm_corpus(place: StoreOptions, model: str, uses: str | None) -> Corpus:
    """Open the store for a model that runs elsewhere; also called in actors."""
    from kvwire.cli.inputs import open_tokenizer
    from kvwire.offline.on_vllm import reading_engine
    from kvwire.runtime.corpus import Coding, Corpus, find_model

    store = place.open_lasting()
    record, pieces = find_model(place.catalog(store), model_name(model)), open_tokenizer(model)
    return Corpus(
        reading_engine(record, pieces, pieces.opening, len(pieces.tokenizer)),
        store,
        **place.whose(),
        coding=Coding(neutral_prefix=0),
        uses=use_file(uses),
    )


def _engine_args(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        msg = f"--engine-args is no JSON ({error}); write an object such as '{{\"max_model_len\": 8192}}'"
        raise ArgumentError(msg) from error
    if not isinstance(found, dict):
        raise ArgumentError("--engine-args is a JSON object of vLLM's arguments, such as '{\"max_model_len\": 8192}'")
    return found
