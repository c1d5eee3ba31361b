"""A proxy before vLLM: OpenAI's requests name documents by placeholders, vLLM gets what it needs to load them."""
