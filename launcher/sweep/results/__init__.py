"""What cells have come to: read from their rows, ranked, compared, written as a table, a file and a page.

Nothing here starts cells or knows how they are chosen.
"""
