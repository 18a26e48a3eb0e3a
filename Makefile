proto:  ## regenerate the protobuf stubs
	.venv/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. services/protocol/proto/*.proto
.PHONY: proto
