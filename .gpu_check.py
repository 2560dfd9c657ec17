import sys, importlib.util, types, time, traceback
import torch
try:
    import pytest
except ImportError:
    pytest = types.ModuleType("pytest"); m = types.SimpleNamespace(gpu=None, skipif=lambda *a, **k: None); pytest.mark = m; sys.modules["pytest"] = pytest
spec = importlib.util.spec_from_file_location("t", "tests/parallel/test_gpu.py"); t = importlib.util.module_from_spec(spec); spec.loader.exec_module(t)
for n in dir(t):
    if n.startswith("test_"):
        try: getattr(t, n)(); print("PASS", n)
        except Exception: print("FAIL", n); traceback.print_exc()
# 124M speed, eager, as a first figure
from ropewalk.model.config import Model
from ropewalk.model.spec import resolve
from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply
from ropewalk.plan.plan import Plan
from ropewalk.train.config import AdamW
from ropewalk.train.optimizer import make_optimizer
from ropewalk.load.batch import Batch
for rows in (16, 32, 64):
    s = resolve(Model(layers=12, width=768, heads=12, mlp="gelu"), vocabulary=50304, sequence_length=1024)
    model = build(s, seed=0, device="cuda")
    ex = apply(Plan(device="cuda", precision="bf16", batch_rows=rows, microbatch_rows=rows), model, lambda p: make_optimizer(p, AdamW()), clip_norm=1.0)
    x = torch.randint(0, 50304, (rows, 1025))
    b = Batch(tokens=x[:, :-1], targets=x[:, 1:], weight=torch.ones(rows, 1024), positions=torch.arange(1024).expand(rows, -1), documents=torch.zeros(rows, 1024, dtype=torch.int32)).pinned()
    for _ in range(3): ex.step(b, lr=1e-4)
    torch.cuda.synchronize(); t0 = time.perf_counter()
    for _ in range(10): r = ex.step(b, lr=1e-4)
    torch.cuda.synchronize(); dt = (time.perf_counter() - t0) / 10
    print("124M rows", rows, round(rows * 1024 / dt), "tok/s", f"mfu {rows*1024/dt*s.flops_per_token()/989e12:.1%}", torch.cuda.max_memory_allocated() / 1e9, "GB", r.loss.item())
    del model, ex; torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
