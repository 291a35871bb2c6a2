"""Tree of Thoughts in 25 lines: branches decode in one batch, voters reread none of them."""

import re
from collections import Counter

from choreograph import Engine, SamplingParams

TASK = "A rope of 12 metres is cut into pieces of 3 metres. How many cuts are needed?"
solve = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=40)
vote = SamplingParams(temperature=0.7, max_tokens=6)

engine = Engine.from_pretrained()
with engine.session(seed=0) as s:
    problem = s.prefill(s.user(f"Solve briefly: {TASK}"))
    branches = [s.decode(s.assistant(f"Solution {i}:"), [problem], sampling=solve) for i in (1, 2, 3)]
    question = s.prefill(s.user(f"Which solution is right? Answer with its number. {TASK}"))
    votes = [s.decode(s.assistant("Number"), [question, *branches], sampling=vote) for _ in range(3)]
    numbers = Counter(n for v in votes for n in re.findall("[123]", v.text)[:1])
    best = int(numbers.most_common(1)[0][0]) if numbers else 1
    answer = s.decode(s.assistant("Answer:"), [question, branches[best - 1]], sampling=solve)
    print(f"best of three: {best};{answer.text}")
    print(f"a voter found {votes[1].usage.cached_tokens} tokens encoded and encoded {votes[1].usage.computed_tokens}")
