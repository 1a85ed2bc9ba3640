"""What people look at: plain facts of sessions, steps and segments for the command line and the browser."""
