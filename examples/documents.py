"""Documents encoded once, asked about in any order: each question pays for itself only."""

from choreograph import Engine, SamplingParams

DOCUMENTS = {
    "mill": "The mill on the Arn was built in 1711 and ground rye until the flood of 1954.",
    "bridge": "The stone bridge has five arches. It was rebuilt after the flood with steel inside.",
    "school": "The school opened in the old customs house. Its first teacher was also the ferryman.",
}
greedy = SamplingParams(temperature=0, max_tokens=24)

engine = Engine.from_pretrained()
with engine.session() as s:
    intro = s.prefill(s.system("Answer from the documents."))
    shelf = {name: s.prefill(s.user(text), [intro]) for name, text in DOCUMENTS.items()}
    engine.run_until_idle()
    for names, question in (
        (["bridge", "mill"], "When was the mill built?"),
        (["school", "bridge", "mill"], "How many arches has the bridge?"),
    ):
        documents = [shelf[name] for name in names]
        answer = s.decode([s.user(question), s.assistant()], [intro, *documents], sampling=greedy)
        print(f"{question} {answer.text}")
        print(f"   reused {answer.usage.cached_tokens} tokens, encoded {answer.usage.computed_tokens}")
