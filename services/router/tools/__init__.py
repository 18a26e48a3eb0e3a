"""Function tools: what a request offers, how a prompt tells of it, and calls found in what the model writes.

    tools, tool_choice ─► spec ─┬─► prompt: the template's own way, or instructions in a system message
                                └─► grammar, where a call is demanded
    text of the answer ─► parsers ─► text and call deltas

Calls nothing: the client runs its functions and sends back what they gave.
"""
