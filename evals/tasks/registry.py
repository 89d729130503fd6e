"""Every task by name. A new one is one file with a `TASK`, and one line here."""

from __future__ import annotations

from longctx.evals.tasks import (
    aggregation,
    common_words,
    counting,
    frequent_words,
    key_value,
    many_shot_copy,
    multi_hop,
    ordering,
    qa_distractors,
    variable_tracking,
)
from longctx.evals.tasks.task import Task

TASKS: dict[str, Task] = {
    module.TASK.name: module.TASK
    for module in (
        variable_tracking,
        common_words,
        frequent_words,
        key_value,
        counting,
        ordering,
        multi_hop,
        qa_distractors,
        many_shot_copy,
        aggregation,
    )
}
