r"""A policy that writes ``\boxed{7}`` or ``\boxed{8}``, each in half of its answers, whatever it is asked."""

from pathlib import Path

from helpers_sglang import make_tiny_model

ANSWERS = "78"
_PATH = r"\boxed{"  # no character twice: the next one depends on the last one alone
_LOGIT = 30.0


def make_boxed_policy(path: Path) -> Path:
    """A Qwen2 whose attention and MLP add nothing: a table of which token follows which. See helpers_sglang.

    An answer follows the line break of the generation prompt and has ten tokens, the last one <|im_end|>.
    """
    import torch
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    width = 320  # a dimension for each of the 259 tokens
    make_tiny_model(path, seed=0, hidden_size=width, num_attention_heads=10)
    model, tokenizer = Qwen2ForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)

    def one(text: str) -> int:
        (token,) = tokenizer.encode(text, add_special_tokens=False)
        return token

    follows = [(a, b) for a, b in zip("\n" + _PATH, _PATH, strict=False)]
    follows += [pair for digit in ANSWERS for pair in (("{", digit), (digit, "}"))] + [("}", "<|im_end|>")]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight", "embed_tokens.weight")):
                parameter.zero_()
        for token in range(model.config.vocab_size):
            model.model.embed_tokens.weight[token, token] = 1.0
        for last, following in follows:
            model.lm_head.weight[one(following), one(last)] = _LOGIT / width**0.5
    model.save_pretrained(path)
    return path
