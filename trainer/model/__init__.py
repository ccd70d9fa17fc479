"""The language model: where it comes from, its tokenizer, its forward pass over packed tokens, its
supervised warm-up. Everything here but `config` and `hf_config` needs torch.
"""

__all__: list[str] = []
