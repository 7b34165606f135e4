r"""A policy that writes ``\boxed{7}`` or ``\boxed{8}``, each in half of its answers, whatever it is asked."""

from pathlib import Path

from helpers.sglang import make_tiny_model

ANSWERS = "78"
_PATH = r"\boxed{"  # no character twice: the next one depends on the last one alone
_LOGIT = 30.0


def make_boxed_policy(path: Path) -> Path:
    """The tiny model of helpers.sglang with other weights: attention and MLP add nothing, the last token says the next.

    An answer follows the line break of the generation prompt and has ten tokens, the last one <|im_end|>.
    """
    import torch
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    make_tiny_model(path, seed=0)
    model, tokenizer = Qwen2ForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)

    def one(text: str) -> int:
        (token,) = tokenizer.encode(text, add_special_tokens=False)
        return token

    follows = list(zip("\n" + _PATH, _PATH, strict=False))
    follows += [pair for digit in ANSWERS for pair in (("{", digit), (digit, "}"))] + [("}", "<|im_end|>")]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight", "embed_tokens.weight")):
                parameter.zero_()
        for axis, last in enumerate(dict.fromkeys(last for last, _ in follows)):
            model.model.embed_tokens.weight[one(last), axis] = 1.0  # times the root of the width, after the norm
            for following in (after for before, after in follows if before == last):
                model.lm_head.weight[one(following), axis] = _LOGIT / model.config.hidden_size**0.5
    model.save_pretrained(path)
    return path
