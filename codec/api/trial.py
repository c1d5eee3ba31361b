"""``trial_blob``: something to decode where nothing is encoded yet."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvwire.codec.api.encode import encode
from kvwire.codec.format.codecs import CODEC_LAYERED
from kvwire.codec.format.pack import Draft, pack_blob
from kvwire.codec.kinds.requests import EncodeRequest
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.codec.kinds.requests import AnyProfile
    from kvwire.types import KVCache


def trial_blob(cache: KVCache, profile: AnyProfile | None = None, *, hidden: Tensor | None = None) -> bytes:
    """Make a blob of one chunk that takes as long to decode as real ones do, for timing and for warming up.

    With a layered profile its content is random, as wide as the profile expects: what only encoders solve of a profile,
    seconds for a large model, is neither read nor solved. With another profile, or none, the cache is encoded.

    Args:
        cache: Of the model; its layout, length and token ids are used.
        profile: To decode with; None: the blob carries its own.
        hidden: As for ``encode``.

    Returns:
        The blob.

    Raises:
        ArgumentError: As ``encode`` says.
        MismatchError: The profile is of another model.
    """
    if profile is None or profile.codec != CODEC_LAYERED:
        return encode(cache, profile, chunk_tokens=cache.tokens, hidden=hidden)
    from kvwire.codec.kinds.layered import TrialEncoder  # who has no profile goes without

    encoder = TrialEncoder(EncodeRequest(cache, profile, None, cache.tokens, hidden, on_device=False))
    segments = encoder.encode_all([(0, cache.tokens)], 1)
    digest = "" if cache.token_ids is None else digest_tokens(cache.token_ids)
    return pack_blob(
        Draft(
            meta=replace(cache.meta, token_digest=digest),
            token_ids=cache.token_ids,
            tokens=cache.tokens,
            chunk_tokens=cache.tokens,
            levels=tuple(encoder.levels),
            profile_digest=encoder.profile_digest,
            profile_bytes=b"",
            segments=segments,
            prefix_layers=encoder.prefix_layers,
            error_to_kl=encoder.error_to_kl,
        )
    )
