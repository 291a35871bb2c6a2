"""Tree of Thoughts in 25 lines: branches decode in one batch, voters reread none of them."""

import re
from collections import Counter

from choreograph import Engine, SamplingParams

TASK = "The mill on the Arn was built in 1711 and ground rye until the flood of 1954. When was the mill built?"
HINT = "According to the text,"  # arithmetic, and judging it, needs a larger model than the bundled one
solve = SamplingParams(temperature=0.4, top_p=0.95, max_tokens=40)
vote = SamplingParams(temperature=0.7, max_tokens=6)

engine = Engine.from_pretrained()
with engine.session(seed=0) as s:
    problem = s.prefill(s.user(TASK))
    branches = [s.decode(s.assistant(f"Answer {i}: {HINT}"), [problem], sampling=solve) for i in (1, 2, 3)]
    question = s.prefill(s.user(f"Which answer is right? Reply with its number. {TASK}"))
    votes = [s.decode(s.assistant("The best is answer"), [question, *branches], sampling=vote) for _ in range(3)]
    numbers = Counter(n for v in votes for n in re.findall("[123]", v.text)[:1])
    best = int(numbers.most_common(1)[0][0]) if numbers else 1
    answer = s.decode(s.assistant(HINT), [problem, branches[best - 1]], sampling=solve)
    print(*(f"answer {i}:{branch.text}" for i, branch in enumerate(branches, 1)), sep="\n")
    print(f"votes: {dict(numbers)}, best: {best}\n{HINT}{answer.text}")
    print(f"a voter reused {votes[1].usage.cached_tokens} tokens and encoded {votes[1].usage.computed_tokens}")
