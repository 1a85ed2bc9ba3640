"""From references to arrays: plan byte ranges purely, fetch them once, put the rows where they belong.

``select`` turns tokens into positions and positions into runs of rows; ``streams`` says where a row lies; ``plan``
merges the byte ranges of a whole call; ``fetch`` reads and checks them; ``assemble`` holds the arrays they land in;
``reader`` composes these. Nothing here knows what a session is.
"""
