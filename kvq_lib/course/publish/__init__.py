"""What makers of the book use and no chapter imports: a chapter to begin with, pages
that follow the editor, releases.  Changing it runs no chapter again."""
