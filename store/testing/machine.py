"""A state machine that drives a store and a dictionary side by side."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule

from kvwire.errors import KvwireError, NotFoundError
from kvwire.store import open_object
from kvwire.store.testing.samples import noise

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

    from kvwire.store import ObjectReader, Store

_OFFSETS = st.integers(0, 70)
_SIZES = (0, 1, 7, 40, 64)  # few, so that other bytes of the same size are written again and again


@dataclass(eq=False)
class _Held:
    """An open reader, and the object as it was then."""

    key: str
    reader: ObjectReader
    data: bytes


class StoreMachine(RuleBasedStateMachine):
    """Random calls on a store, each compared with what a dictionary does; ``hypothesis`` finds the shortest failure.

    A subclass says how to make an empty store, and a test module runs it::

        class Machine(StoreMachine):
            def open_store(self):
                return MyStore(fresh_folder())

        TestMachine = Machine.TestCase
        TestMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)

    ``close_store`` is called at the end of each run. ``reopen_store`` closes the store and opens the same place again;
    None for a store that forgets. has_snapshots: as in ``StoreConformance``. ``names`` are the keys in use, and
    ``contents`` the bytes that may be written under one: a store that takes content-addressed objects only needs its
    own.
    """

    has_snapshots: ClassVar[bool] = True
    names: ClassVar[tuple[str, ...]] = ("a", "b/c", "b/d-e", "b/d/f", "b/d/g+h", "ba", "z=/1/2/3")
    held = Bundle("held")
    keys = st.runner().flatmap(lambda self: st.sampled_from(self.names))
    objects = st.runner().flatmap(
        lambda self: st.sampled_from(self.names).flatmap(lambda key: st.tuples(st.just(key), self.contents(key)))
    )
    prefixes = st.runner().flatmap(
        lambda self: st.sampled_from(sorted({name[:cut] for name in self.names for cut in (0, 1, 2, 3, 4, 9)}))
    )

    def __init__(self) -> None:
        """Open an empty store."""
        super().__init__()
        self.model: dict[str, bytes] = {}
        self.readers: list[_Held] = []
        self.store = self.open_store()

    def open_store(self) -> Store:
        """Make an empty store."""
        raise NotImplementedError

    def close_store(self, store: Store) -> None:
        """Give the store up at the end of a run."""
        store.close()

    def reopen_store(self, store: Store) -> Store | None:
        """Close the store and open the same place again; None where that would be an empty one."""
        del store
        return None

    def contents(self, key: str) -> SearchStrategy[bytes]:
        """What may be written under a key."""
        del key
        return st.builds(noise, st.sampled_from(_SIZES), st.integers(0, 3))

    @rule(one=objects)
    def put(self, one: tuple[str, bytes]) -> None:
        key, data = one
        self.store.put(key, data)
        self.model[key] = data

    @rule(one=objects)
    def create(self, one: tuple[str, bytes]) -> None:
        key, data = one
        writes = len(self.model.get(key, b"")) != len(data) or key not in self.model
        assert self.store.create(key, data) == writes
        if writes:
            self.model[key] = data

    @rule(key=keys, start=_OFFSETS, length=st.none() | _OFFSETS)
    def get(self, key: str, start: int, length: int | None) -> None:
        end = None if length is None else start + length
        if self._is_there(key, lambda: self.store.get(key, start, end)):
            assert self.store.get(key, start, end) == self.model[key][start:end]

    @rule(key=keys)
    def stat(self, key: str) -> None:
        if self._is_there(key, lambda: self.store.stat(key)):
            stat, again = self.store.stat(key), self.store.stat(key)
            assert stat.size == len(self.model[key])
            assert (stat.size, stat.etag) == (again.size, again.etag)

    @rule(key=keys)
    def delete(self, key: str) -> None:
        self.store.delete(key)
        self.model.pop(key, None)

    @rule(gone=st.lists(keys, max_size=4))
    def delete_many(self, gone: list[str]) -> None:
        self.store.delete_many(iter(gone))
        for key in gone:
            self.model.pop(key, None)

    @rule(prefix=prefixes, after=st.just("") | keys, limit=st.integers(1, 9))
    def scan(self, prefix: str, after: str, limit: int) -> None:
        wanted = sorted(key for key in self.model if key.startswith(prefix) and key > after)
        listed = list(islice(self.store.scan(prefix, after), limit))
        assert [(one.key, one.size) for one in listed] == [(key, len(self.model[key])) for key in wanted[:limit]]
        assert list(self.store.keys(prefix, after)) == wanted

    @rule(target=held, key=keys)
    def hold(self, key: str) -> object:
        if not self._is_there(key, lambda: open_object(self.store, key)):
            return multiple()
        reader = open_object(self.store, key)
        one = _Held(key, reader, self.model[key])
        self.readers.append(one)
        assert reader.size == len(one.data)
        return one

    @rule(one=held, start=_OFFSETS, length=_OFFSETS)
    def read_held(self, one: _Held, start: int, length: int) -> None:
        if one not in self.readers:  # closed when the store was opened again
            return
        try:
            assert one.reader.read(start, start + length) == one.data[start : start + length]
        except KvwireError:
            assert not self.has_snapshots
            assert self.model.get(one.key) != one.data

    @rule(one=consumes(held))
    def release(self, one: _Held) -> None:
        if one in self.readers:
            one.reader.close()
            self.readers.remove(one)

    @rule()
    def reopen(self) -> None:
        self._release_all()
        self.store = self.reopen_store(self.store) or self.store

    def teardown(self) -> None:
        """Compare everything, and close."""
        try:
            assert {one.key: one.size for one in self.store.scan("")} == {k: len(d) for k, d in self.model.items()}
            assert {key: self.store.get(key) for key in self.model} == self.model
        finally:
            self._release_all()
            self.close_store(self.store)

    def _release_all(self) -> None:
        while self.readers:
            self.readers.pop().reader.close()

    def _is_there(self, key: str, action: Callable[[], object]) -> bool:
        """Whether the model has the key; where not, the action must find nothing."""
        if key in self.model:
            return True
        with suppress(NotFoundError):
            action()
            raise AssertionError(f"{key} was deleted or never written, and is there")
        return False
