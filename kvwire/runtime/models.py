"""Which model a store's documents are of, from what the store itself says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, CorruptError, NotFoundError

if TYPE_CHECKING:
    from kvwire.store import Catalog, ModelRecord

_LEAST = 6  # digits of a digest that name a model
_MOST_NAMED = 8


def find_model(catalog: Catalog, model: str = "") -> ModelRecord:
    """Look a model up among the records of a tenant."""
    records, damage = _records(catalog)
    found = [record for record in records if not model or _fits(record, model)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{each.meta.model_id} ({each.meta.config_digest()[:16]})" for each in found[:_MOST_NAMED])
        msg = f"several models fit {model!r}: {names}; name one by its digits"
        raise ArgumentError(msg)
    if damage is not None:
        raise damage
    known = ", ".join(record.meta.model_id for record in records[:_MOST_NAMED]) or "none"
    msg = (
        f"{catalog.store.url} has no record of {f'model {model!r}' if model else 'a model'} for this tenant (it has: "
        f"{known}); encode any document with it (kvwire encode), even one that is there, which writes the record, or "
        "give an engine: Corpus(engine, store)"
    )
    raise NotFoundError(msg)


def _records(catalog: Catalog) -> tuple[list[ModelRecord], CorruptError | None]:
    """All records that can be read, and what was wrong with the first of the others."""
    records: list[ModelRecord] = []
    damage: CorruptError | None = None
    for space in catalog.configurations():
        try:
            record = catalog.model(space)
        except CorruptError as error:
            damage = damage or error
            continue
        if record is not None:
            records.append(record)
    return records, damage


def _fits(record: ModelRecord, model: str) -> bool:
    digests = (record.meta.model_revision, record.meta.config_digest())
    return model == record.meta.model_id or (len(model) >= _LEAST and any(each.startswith(model) for each in digests))
