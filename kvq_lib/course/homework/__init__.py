"""Graded homework: one source for exercise, solution and grading key, and the grader.

Modules, in the order in which a homework meets them: `new` writes a template, `source`
reads one (`blocks` and `rules` check it), `build` makes the notebooks and the key,
`verify` proves the key, `submission`, `runner`, `sandbox` and `session` run what a
student handed in, `compare`, `grade` and `report` mark it.  `commands` and
`grade_commands` are the command line.
"""
