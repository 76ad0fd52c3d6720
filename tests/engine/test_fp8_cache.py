"""The engine with FP8 rows in its cache."""

from __future__ import annotations

from glm5ray.config import config_from_dict
from glm5ray.engine.llm import LLM
from glm5ray.protocol import SamplingParams


def test_nano_answers_the_same_question_with_fp8_rows() -> None:
    prompt = "Count from one to five:"
    answers = []
    for kind in ("auto", "fp8"):
        cache = {"kv_dtype": kind, "num_pages": 64}
        with LLM(config=config_from_dict({"cache": cache, "scheduler": {"max_num_seqs": 4}})) as llm:
            answers.append(llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0))[0])
    exact, quantised = (answer.choices[0].token_ids for answer in answers)
    assert len(quantised) == len(exact)
    assert quantised[:2] == exact[:2]
