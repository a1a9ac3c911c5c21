"""What needs a CUDA device: run by ``scripts/test --gpu``. A package, so that its conftest is not taken for tests'."""
