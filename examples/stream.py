"""From import to streamed text in five lines. First: anydraft pull gemma3-270m smollm2-135m"""

import anydraft

engine = anydraft.load("gemma3-270m", draft="smollm2-135m")
for chunk in engine.stream("The steam engine", max_tokens=48):
    print(chunk.text, end="", flush=True)
print()
