"""The question bank and its faces: quizzes, a mock interview, cards, a sheet.

    from kvq_lib.course.questions import quiz

    quiz("book/02_memory_bottleneck")

The bank is the folder `book/questions`. `bank` reads it and `rules` checks it,
`marking` says what an answer is worth, and every face shows the same questions: `quiz`
at the end of a chapter, `mock` on a page, `terminal` as `kvq quiz`, `deck` for Anki and
`sheet` on paper.
"""

from .quiz import quiz
