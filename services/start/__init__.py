"""What every way of starting pdray shares: checks of the machine, ports, the prepared model, secret, shares of cores.

Knows neither Ray nor torch. It starts no service: `services.launch` does that for `pdray serve`, `services.app` for
Ray.
"""
