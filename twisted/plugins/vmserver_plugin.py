from twisted.application.service import ServiceMaker

vmserver = ServiceMaker("vmserver", "vmserver.service", "The Infranetes agent in a sandbox's VM", "vmserver")
