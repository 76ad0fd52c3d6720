"""Building a batch, against tensors written by hand."""

import pytest
import torch

from glm5ray.protocol import Capacity, NewSequence, SamplingParams, StepInput
from glm5ray.worker.batch import Mirror

CAPACITY = Capacity(num_pages=16, page_size=4, max_model_len=24, vocab_size=100, eos_token_ids=(0,))


def new(seq_id, tokens, pages, num_prompt_tokens=None, **params) -> NewSequence:
    return NewSequence(
        seq_id=seq_id,
        request_id=f"r{seq_id}",
        index=0,
        token_ids=tuple(tokens),
        num_prompt_tokens=num_prompt_tokens or len(tokens),
        sampling=SamplingParams(**params),
        pages=tuple(pages),
    )


def step(step_id, slices, **more) -> StepInput:
    ids, starts, counts = (list(column) for column in zip(*slices, strict=True)) if slices else ([], [], [])
    return StepInput(epoch=0, step_id=step_id, seq_ids=ids, starts=starts, num_tokens=counts, **more)


@pytest.fixture
def mirror() -> Mirror:
    return Mirror(CAPACITY, max_num_seqs=2, device=torch.device("cpu"))


def build(mirror, step_input):
    mirror.apply(step_input)
    return mirror.build(step_input)


def test_a_chunk_and_a_whole_prompt(mirror):
    built = build(
        mirror,
        step(
            0,
            [(5, 0, 3), (6, 4, 2)],
            new_sequences=(new(5, [10, 11, 12, 13], [7]), new(6, [20, 21, 22, 23, 24, 25], [2, 9])),
        ),
    )
    batch = built.batch
    assert batch.token_ids_T.tolist() == [10, 11, 12, 24, 25]
    assert batch.positions_T.tolist() == [0, 1, 2, 4, 5]
    assert batch.slots_T.tolist() == [28, 29, 30, 36, 37]
    assert batch.page_table_SP.tolist() == [[7, -1], [2, 9]]
    assert batch.starts == (0, 4)
    assert batch.num_tokens == (3, 2)
    assert batch.logits_rows_L.tolist() == [4]
    assert [s.seq_id for s in built.sampling] == [6]


def test_a_decode_takes_the_token_that_only_the_device_has(mirror):
    first = build(mirror, step(0, [(1, 0, 4)], new_sequences=(new(1, [3, 4, 5, 6], [8]),)))
    mirror.last_token_R[first.sampling[0].row] = 77
    built = build(mirror, step(1, [(1, 4, 1)], new_pages={1: [3]}))
    assert built.batch.token_ids_T.tolist() == [77]
    assert built.batch.slots_T.tolist() == [12]
    assert built.batch.page_table_SP.tolist() == [[8, 3]]
    assert built.sampling[0].num_output_tokens == 2


def test_a_preempted_sequence_comes_back_with_its_output(mirror):
    build(mirror, step(0, [(1, 0, 2)], new_sequences=(new(1, [3, 4], [8]),)))
    build(mirror, step(1, [(9, 0, 1)], dropped=[1], new_sequences=(new(9, [50], [8]),)))
    built = build(mirror, step(2, [(1, 0, 3)], new_sequences=(new(1, [3, 4, 60], [1], num_prompt_tokens=2),)))
    assert built.batch.token_ids_T.tolist() == [3, 4, 60]
    assert built.sampling[0].num_output_tokens == 2
    assert built.batch.slots_T.tolist() == [4, 5, 6]


def test_prompt_scoring_covers_each_prompt_position_once(mirror):
    first = build(
        mirror, step(0, [(1, 0, 2)], new_sequences=(new(1, [3, 4, 5], [0], prompt_logprobs=1, max_tokens=0),))
    )
    second = build(mirror, step(1, [(1, 2, 1)]))
    assert [(first_row, rows, start) for _, first_row, rows, start in first.scoring] == [(0, 2, 0)]
    assert second.scoring == []


def test_rows_are_used_again(mirror):
    for number in range(20):
        dropped = [number - 1] if number else []
        built = build(
            mirror, step(number, [(number, 0, 1)], dropped=dropped, new_sequences=(new(number, [1], [number % 4]),))
        )
        assert built.batch.page_table_SP.tolist() == [[number % 4]]


def test_an_old_page_table_row_does_not_show_through(mirror):
    build(mirror, step(0, [(1, 0, 12)], new_sequences=(new(1, range(12), [5, 6, 7]),)))
    built = build(
        mirror,
        step(1, [(2, 0, 1), (3, 0, 9)], dropped=[1], new_sequences=(new(2, [1], [5]), new(3, range(9), [1, 2, 3]))),
    )
    assert built.batch.page_table_SP.tolist() == [[5, -1, -1], [1, 2, 3]]


@pytest.mark.parametrize(
    "bad",
    [
        step(1, [(1, 4, 2)]),  # past the known tokens
        step(1, [(1, 5, 1)]),
        step(1, [(1, 4, 1)]),  # no page behind it
        step(1, [(1, 0, 1)], new_sequences=(new(1, [1], [0]),)),  # known already
    ],
)
def test_a_wrong_step_is_refused(mirror, bad):
    build(mirror, step(0, [(1, 0, 4)], new_sequences=(new(1, [3, 4, 5, 6], [8]),)))
    with pytest.raises(AssertionError):
        build(mirror, bad)


def test_an_unknown_sequence_is_refused(mirror):
    with pytest.raises(KeyError):
        build(mirror, step(0, [(4, 0, 1)]))
