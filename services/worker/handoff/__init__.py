"""What both ends of a ticket need on every worker: a reader's tickets and the writers that it let in, a writer's
tickets and leases, and a pull, which is a ticket that the reader asks for.

It does not know who computes and who decodes: that is what `services.prefill` and `services.decode` add.
"""
