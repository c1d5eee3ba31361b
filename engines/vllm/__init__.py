"""The adapter for vLLM: its connector, pages and requests; ``kvwire.vllm`` is its public name."""
