"""Tiny models run fastest on one thread."""

from ..engines.conftest import one_thread  # noqa: F401 - a fixture
