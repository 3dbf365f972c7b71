"""Building vLLM from source for the cards that are there, without flash-attn (docs/build.md)."""
