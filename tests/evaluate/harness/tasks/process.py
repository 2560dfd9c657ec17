"""Functions of the task files beside this one."""


def shouted(rows):
    """The rows that are no repetition, with their questions in capitals."""

    def one(row):
        return {"question": row["question"].upper()}

    return rows.map(one).filter(lambda row: row["label"] != 3)
