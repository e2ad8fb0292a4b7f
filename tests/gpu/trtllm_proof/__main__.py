import sys

from tests.gpu.trtllm_proof.program import main

sys.exit(main())
