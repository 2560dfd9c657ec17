"""Which step read which rows."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.load.history import History

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.sampled_from([1, 2, 8, 8, 8])),
        st.tuples(st.just("skip"), st.integers(0, 20)),
        st.tuples(st.just("continue"), st.just(0)),
    ),
    max_size=40,
)


def told(events: list[tuple[str, int]]) -> tuple[History, list[range], set[int]]:
    """The history of some events, and beside it the rows of every step and the rows left out, written down."""
    history, steps, left_out, row = History(), [], set(), 0
    for kind, rows in events:
        if kind == "continue":
            history = History.from_json(json.loads(json.dumps(history.to_json())))
        elif kind == "read":
            assert history.read(rows) == range(row, row + rows)
            steps.append(range(row, row + rows))
        else:
            history.skip(rows)
            left_out |= set(range(row, row + rows))
        row += rows
    return history, steps, left_out


@settings(max_examples=150, deadline=None)
@given(events=EVENTS)
def test_steps_and_rows_find_each_other_through_ramps_skips_and_interruptions(events: list[tuple[str, int]]) -> None:
    history, steps, left_out = told(events)
    assert [history.rows_of(step) for step in range(len(steps))] == steps
    step_of = {row: step for step, rows in enumerate(steps) for row in rows}
    assert [history.step_of(row) for row in range(history.row + 3)] == [
        step_of.get(row) for row in range(history.row + 3)
    ]
    assert {row for skipped in history.skipped for row in skipped} == left_out
    assert history.rows_of(len(steps)) is None
    assert history.rows_of(-1) is None


def test_a_long_run_of_equal_batches_is_one_entry() -> None:
    history = History()
    for _ in range(1000):
        history.read(512)
    history.skip(1024)
    for _ in range(1000):
        history.read(512)
    assert history.to_json() == {
        "step": 2000,
        "row": 2000 * 512 + 1024,
        "batches": [[0, 0, 512], [1000, 1000 * 512 + 1024, 512]],
        "skipped": [[1000 * 512, 1000 * 512 + 1024]],
    }


def test_a_state_of_one_number_is_read_and_what_came_before_is_unknown() -> None:
    history = History.from_json({"row": 640})
    assert history.read(64) == range(640, 704)
    assert history.step_of(100) is None
    assert history.step_of(650) == 0
