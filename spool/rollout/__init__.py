"""What a session is: chains of steps, what each of them stores or shares, and the segments that views make of them.

Pure: no payload, no I/O, no locks. A `SessionState` is the fold of a session's events; whoever holds one serialises the
calls on it.
"""
