"""What every worker is made of, whatever its role: gRPC service, Attach, live requests, registration, and two children.

The role's half of the hand-off is added by `services.prefill.writer` or `services.decode.reader`. This package routes
nothing, computes nothing and moves no bytes: the engine child computes, the transfer child moves.
"""
