"""A model and a tokenizer that are in memory already, lists of prompts, several answers.

Loaded with transformers as any program does it; anydraft leaves the objects as they are.
First: anydraft pull gemma3-270m smollm2-135m
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import anydraft
from anydraft import store


def with_transformers(name: str):  # -> (model, tokenizer)
    folder = store.resolve(name)
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


with anydraft.load(
    with_transformers("gemma3-270m"), draft=with_transformers("smollm2-135m")
) as engine:
    # A list of prompts is one batch.
    for answer in engine.generate(["The capital of France is", "2, 4, 6,"], max_tokens=12):
        print(repr(answer.text))

    # Two answers to one prompt. The seed gives them again, with any draft or none.
    for answer in engine.generate("Once upon a time", n=2, temperature=0.8, seed=1, max_tokens=16):
        print(answer.choice, repr(answer.text), f"{answer.stats.tokens_per_round:.2f} tokens/round")

    plain = engine.plain().generate("Once upon a time", max_tokens=16)
    drafted = engine.generate("Once upon a time", max_tokens=16)
    print("identical:", plain.token_ids == drafted.token_ids)
