"""What commands tell while they work: stages, on a logger of their own, which says nothing unless someone listens."""

from __future__ import annotations

import logging

PROGRESS = logging.getLogger("kvwire.progress")
"""Stages as they begin, one line each at INFO; the command line prints them on stderr."""
