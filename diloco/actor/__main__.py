import sys

from diloco.actor import main

sys.exit(main())
