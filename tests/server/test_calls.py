"""What joins and what does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from glm5ray.engine.results import TextDelta
from glm5ray.protocol import FinishReason
from glm5ray.server.calls import News

_NEWS = st.builds(
    lambda number, index, text, ended: News(
        number,
        TextDelta(
            request_id="r",
            index=index,
            text=text,
            token_ids=tuple(map(ord, text)),
            finish_reason=FinishReason.STOP if ended else None,
        ),
    ),
    st.integers(0, 1),
    st.integers(0, 1),
    st.text("ab", max_size=3),
    st.booleans(),
)


@given(_NEWS, _NEWS)
def test_only_news_of_one_answer_join_and_nothing_is_lost(first: News, second: News):
    both = first.joined(second)
    assert first.delta is not None
    assert second.delta is not None
    if (first.number, first.delta.index) != (second.number, second.delta.index):
        assert both is None
        return
    assert both is not None
    assert both.delta is not None
    assert both.delta.text == first.delta.text + second.delta.text
    assert both.delta.token_ids == first.delta.token_ids + second.delta.token_ids
    assert both.delta.finish_reason == second.delta.finish_reason
    assert both.result is second.result


def test_an_error_joins_nothing():
    news = News(0, TextDelta(request_id="r", index=0, text="a", token_ids=(97,)))
    assert news.joined(News(0)) is None
    assert News(0).joined(news) is None
