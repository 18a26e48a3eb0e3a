"""Who may call the router, and how much: one core (`guard`) behind an ASGI middleware and a gRPC interceptor.

    call ─► key ─► Caller (name, tenant, scopes) ─► scope of the route ─► limits of tenant and key ─► the front
             └─ 401      unknown key                └─ 403               └─ 429

With no keys file everybody is `ANONYMOUS` and may do everything. It encrypts nothing: TLS is the ports' business.
"""
