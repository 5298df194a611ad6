"""The worker groups as the controller knows them: started, called, watched, restarted."""
