"""The GPU benchmark's checks run in Triton's interpreter."""

from ..interpreter import quicken

quicken()
