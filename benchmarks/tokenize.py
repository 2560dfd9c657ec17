"""Text shards -> token shards: runs encoding.py, which says what is measured.

    make bench NAME=tokenize
    python benchmarks/tokenize.py --quick

The standard library has a module of this name. Whoever imports it from a script in this folder finds this file first,
and gets the standard one from it.
"""

import importlib.util
import os
import sys

if __name__ == "__main__":
    from encoding import main

    main()
else:
    standard = os.path.join(os.path.dirname(os.__file__), "tokenize.py")
    spec = importlib.util.spec_from_file_location(__name__, standard)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[__name__] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[__name__])
