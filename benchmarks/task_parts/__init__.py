"""A tiny model whose tasks need attention across documents: its prompts, its training and its evaluation."""
