"""Tokenizers: vocabularies, the rows of embeddings, chat templates."""
