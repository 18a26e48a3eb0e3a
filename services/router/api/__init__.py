"""Further HTTP endpoints beside chats and completions: responses, messages (Anthropic's form), tokens, and those that
the served model cannot fill.

Each reads its own body into the same `Ask`, and writes what comes back in its own documents and events.
"""
