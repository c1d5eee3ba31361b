"""First bytes of objects, to recognise them without parsing."""

from __future__ import annotations

SEALED_MAGIC = b"\x89KVE\r\n\x1a\n"
"""Of a sealed object, format.md section 9."""
TEXT_MAGIC = b"\x89KVT\r\n\x1a\n"
"""Of a text, format.md section 8."""
SHIFT_MAGIC = b"\x89KVS\r\n\x1a\n"
"""Of a link shift, format.md section 14."""
