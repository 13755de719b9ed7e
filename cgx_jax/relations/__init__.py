"""Compares a program over a whole batch with the programs of ranks that have a part of it each.

relation    What plain jit's value is, given the ranks' values: `Relation`.
rules       How each primitive passes relations on.
walk        Walks both programs together: `relate`.
sizes       Whether a program for one example, where dimensions vanish, is that for more.
"""
