"""``kvwire serve``: the objects of any store over HTTP."""
