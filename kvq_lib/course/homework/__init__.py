"""Graded homework: one source for exercises, solutions and keys, and their grading.

The half that builds: source, build, verify, new, commands.  The half that grades:
submission, runner, sandbox, session, compare, grade, report, grade_commands.
"""
