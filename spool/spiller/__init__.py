"""The spiller: one process a hot root that brings sealed packs to the cold root, and takes away what may go.

``upload`` puts packs into the cold root, ``plan`` says which and what else is due (pure), ``evict`` frees the hot copy,
``collect`` deletes what retention lets go, ``loop`` does all of that again and again, ``elect`` sees to it that there
is one of it and never two. Writers only seal.
"""
