"""Two models of one family over one report: the second computes some layers of it and takes the others over.

python examples/two_models.py
"""

import torch

from choreograph import Engine, SamplingParams

REPORT = "Unit 7 stopped at 14:20. The pump had run dry; its seal is worn and the spare is at the harbour store. "


def main(repeat: int = 4, tokens: int = 24) -> None:
    engine = Engine.from_pretrained(dtype="float32")
    trained = Engine.from_pretrained(dtype="float32").core.hf_model.model  # stands for one that you have fine-tuned
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
    engine.add_model("planner", trained)
    engine.enable_layer_reuse("planner", "base", pattern=[0, 10, 20])
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    with engine.session() as s:
        report = s.prefill(s.user(REPORT * repeat))  # the base encodes it
        question = s.prefill(s.user("What has to be done first?"), [report])
        for share in ("partial", "recompute"):
            answer = s.decode(s.assistant(), [report, question], model="planner", kv_reuse=share, sampling=sampling)
            print(f"{share}: {answer.text}")
            for version in (m.variants["planner", share] for m in (report, question)):
                print(f"  layers computed of {version.length} tokens: {version.computed_layers or 'all'}")


if __name__ == "__main__":
    main()
